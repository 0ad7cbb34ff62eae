from benchmarks.distributed.run import main

raise SystemExit(main())
