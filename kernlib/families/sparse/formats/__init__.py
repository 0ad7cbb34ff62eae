"""How compressed matrices lie in memory: ``registry``, then a module for each format."""
