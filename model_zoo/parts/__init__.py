"""The parts that the zoo's models are made of: one small file each, with its equation, shapes and source."""
