"""How a click is heard while a cell runs, where the front end asks for no kernel subshell."""
