#!/usr/bin/env bash
# lmdb 3.0.0 (py-lmdb; the formats 0.9 and 1.0 alike): the handle of a named database that was
# dropped, txn.drop(db), is refused, InvalidParameterError, until some other database is opened.
# That one gets the free slot, and from then on the old handle is a handle of it: reads answer with
# its values, and writes go into it, without an error.
#
# Output seen:
#
#     format 0.9: dropped: InvalidParameterError; after open_db(b"new"): b'of new', then new holds
#     [(b'key', b'of new'), (b'other', b'for old')]
#     format 1.0: dropped: InvalidParameterError; after open_db(b"new"): b'of new', then new holds
#     [(b'key', b'of new'), (b'other', b'for old')]
#
# Why it matters: handles are kept in attributes and modules. A test or a clean-up that drops and
# goes on sees the error, so it looks like a promise. In a program that drops a database and opens
# the next one (a version of a cache, a table of results) values of one end up in the other. What
# does instead: drop(db, delete=False) empties it and keeps the handle; or forget the handle
# together with the database.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet lmdb==3.0.0 2>/dev/null
cat >"$folder/dropped.py" <<'PYTHON'
import sys

import lmdb

environment = lmdb.open(sys.argv[1], max_dbs=2, lib_version=int(sys.argv[1] == "1.0"))
old = environment.open_db(b"old")
with environment.begin(write=True) as txn:
    txn.put(b"key", b"of old", db=old)
with environment.begin(write=True) as txn:
    txn.drop(old)
try:
    with environment.begin(write=True) as txn:
        dropped = txn.get(b"key", db=old)
except lmdb.Error as error:
    dropped = type(error).__name__
new = environment.open_db(b"new")
with environment.begin(write=True) as txn:
    txn.put(b"key", b"of new", db=new)
with environment.begin(write=True) as txn:
    read = txn.get(b"key", db=old)
    txn.put(b"other", b"for old", db=old)
with environment.begin() as txn:
    print(f'dropped: {dropped}; after open_db(b"new"): {read}, then new holds')
    print(list(txn.cursor(db=new)))
PYTHON
cd "$folder"
for format in 0.9 1.0; do
    said=$("$folder/environment/bin/python" dropped.py "$format")
    printf 'format %s: %s\n' "$format" "$said"
    [[ $said == "dropped: InvalidParameterError; after open_db(b\"new\"): b'of new', then new holds
[(b'key', b'of new'), (b'other', b'for old')]" ]]
done
