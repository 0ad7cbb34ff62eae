"""Bad calls of every public function: each ends in an error that names the argument, or in the
right result. ``cases`` holds what a case is and how it is judged, ``wrong`` the values that take
an argument's place, and ``of_<family>`` the entries of a family: its functions, valid arguments of
each, and what they should give."""
