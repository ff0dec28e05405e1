"""Pages for people: what a mask is, tile by tile and rank by rank, as one HTML file without a network."""
