from benchmarks.kronecker_product.run import main

raise SystemExit(main())
