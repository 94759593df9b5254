"""Starting a job: a pure plan of its processes, executors that run them, a supervisor that ends them."""
