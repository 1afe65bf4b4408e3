"""The router in virtual time: modelled workers with the product's own directory, index, fleet, placer and
policies. Nothing here chooses workers: the product's code does."""
