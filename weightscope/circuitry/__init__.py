"""What each head is, and which heads talk to each other, from the weights alone."""
