from benchmarks.cpu.run import main

raise SystemExit(main())
