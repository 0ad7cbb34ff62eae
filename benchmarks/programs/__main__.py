from benchmarks.programs.run import main

raise SystemExit(main())
