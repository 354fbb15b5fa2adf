"""Row updates and reads for TPUs.

row_updates     an update of rows, and a read of lines, as kernels of row DMAs
choice          which updates are made by the kernel, 16-bit rows and single entries too
"""
