"""What the tables of the modules beside say: the guess, what was seen on an H200, what follows."""
