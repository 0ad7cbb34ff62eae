from benchmarks.kronecker_sparse.run import main

raise SystemExit(main())
