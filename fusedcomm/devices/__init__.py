"""Where codecs run: a file for each kind of device."""
