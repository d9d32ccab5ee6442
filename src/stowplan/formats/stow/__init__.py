"""stowplan's own file form, `.stow.json`: a whole document, guarded by a version and a digest.

    {"format": "stow", "version": 1, "digest": "sha256:...",
     "document": {"tensors": [...], "ops": [...], ...}}

The digest is taken over the document in its one canonical spelling (no blanks, fields in order): another tool
may lay a file out anew, but other content has another digest.
"""

from stowplan.formats.stow.file import FORMAT, read, recognise, write

__all__ = ["FORMAT", "read", "recognise", "write"]
