"""What each head is, and which heads read what others write, from the weights alone."""
