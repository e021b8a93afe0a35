"""Orders, loads and seeds samples; configs name the orders."""
