"""What a state consists of: leaves, values, random numbers, the loader's position, and the way back."""
