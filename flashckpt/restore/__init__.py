"""From where a snapshot rests to the live state: the choice of a step, the tiers, the filling."""
