from benchmarks.gallery.run import main

raise SystemExit(main())
