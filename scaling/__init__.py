"""How many prefill and decode workers a fleet needs, and which worker has which role. Time is passed in.

The simulator and the Ray Serve application use the same classes. Serve pickles the policy by value into its
controller, where our packages need not be installed, so all but `load` import the standard library only.
"""
