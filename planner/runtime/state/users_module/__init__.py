"""The user's module after its model was taken over, and what lies beside stages.

`away` leaves the module without values and tells of gradients that went with them, `untouched`
refuses changes of it, `outside` keeps what of its state dict no stage holds, and `user_tensors`
cuts tensors of the script's own.
"""
