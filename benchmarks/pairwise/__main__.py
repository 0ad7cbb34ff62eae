from benchmarks.pairwise.run import main

raise SystemExit(main())
