"""The files of the page at ``/``: as they are served."""
