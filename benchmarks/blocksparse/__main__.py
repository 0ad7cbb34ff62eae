from benchmarks.blocksparse.run import main

raise SystemExit(main())
