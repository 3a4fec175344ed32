"""From where a snapshot rests to the live state: the ladder, the tiers, the filling."""
