"""What trains on ranks that come and go: sessions from view to view, and the state that joiners get."""
