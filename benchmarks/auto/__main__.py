from benchmarks.auto.run import main

raise SystemExit(main())
