from benchmarks.sparse.run import main

raise SystemExit(main())
