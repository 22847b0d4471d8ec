"""The engine in a child process: what crosses the socket pair, the child's side, and the supervisor on the parent's."""
