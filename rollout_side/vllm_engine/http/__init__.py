"""HTTP half of a replica: its server, the models that it names, the requests that use them."""
