"""The gallery: scripts of ``examples/gallery``, run, and the pages of ``docs/gallery`` about them.

``scripts`` reads a script, ``run`` runs it, ``pages`` writes what is read.
"""
