"""The router in virtual time: modelled workers under the product's own directory, index, fleet, placer and
policies. Nothing here decides where a request goes; that is what is simulated."""
