"""A module beside whose thread nothing can be forked."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
