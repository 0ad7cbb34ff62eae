#!/usr/bin/env bash
# lmdb 3.0.0 (py-lmdb, which brings LMDB 0.9.36 and 1.0): the names of named databases are keys of
# the main database, which is how they are listed. In the format 0.9 the key is the name. In 1.0 it
# has a zero byte more. So get(b"name") of the main database is None there, a value may be put under
# the name of a database, and both then stand beside each other. open_db takes either spelling.
#
# Output seen:
#
#     0.9: listed [b'name'], get(name) True, open_db(listed) opened, put(name) IncompatibleError
#     1.0: listed [b'name\x00'], get(name) False, open_db(listed) opened, put(name) True
#
# Why it matters: programs that copy, check or count a file walk the main database, compare names
# ("is the table of weights there?") and write them elsewhere. On a file of 1.0, which the same
# lmdb.open() opens without being asked, every comparison fails, and no error tells. What does
# instead: ask by open_db(name, create=False), and cut a zero byte at the end of a listed name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet lmdb==3.0.0 2>/dev/null
cat >"$folder/names.py" <<'PYTHON'
import sys

import lmdb

environment = lmdb.open(sys.argv[1], max_dbs=2, lib_version=int(sys.argv[1] == "1.0"))
database = environment.open_db(b"name")
with environment.begin() as txn:
    listed = list(txn.cursor().iternext(values=False))
    is_key = txn.get(b"name") is not None
try:
    environment.open_db(listed[0], create=False)
    reopened = "opened"
except lmdb.Error as error:
    reopened = type(error).__name__
try:
    with environment.begin(write=True) as txn:
        put = txn.put(b"name", b"value")
except lmdb.Error as error:
    put = type(error).__name__
print(f"listed {listed}, get(name) {is_key}, open_db(listed) {reopened}, put(name) {put}")
PYTHON
cd "$folder"
expected=("listed [b'name'], get(name) True, open_db(listed) opened, put(name) IncompatibleError"
    "listed [b'name\\x00'], get(name) False, open_db(listed) opened, put(name) True")
for format in 0.9 1.0; do
    said=$("$folder/environment/bin/python" names.py "$format")
    printf '%s: %s\n' "$format" "$said"
    [[ $said == "${expected[0]}" ]]
    expected=("${expected[@]:1}")
done
