"""Tables, pictures and one page of finished runs, from their run folders alone."""
