"""Where bytes rest: small files and names behind one narrow Protocol."""
