"""Row updates and reads for TPUs.

row_updates     an update of rows, and a read of lines, as kernels of row DMAs
choice          which updates are made by the kernel
narrow_rows     16-bit rows and single entries, read and written by the kernel
"""
