"""What one op allocates and saves for its backward.

In: a program of one rank. Out: its storages (`storage`), what each op keeps (`kept_rules` for the
families, `kept_products` for matrix products), all of it once by storage (`saved`), and what
kernels hold only while they run (`kernel_scratch`).
"""
