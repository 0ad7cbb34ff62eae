from benchmarks.service.run import main

raise SystemExit(main())
