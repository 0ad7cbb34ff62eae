"""Programs that the modules beside start as processes of their own. Each answers one line of JSON
for each thing it was told to do."""
