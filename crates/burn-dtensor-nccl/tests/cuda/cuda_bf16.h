/* nccl.h includes this header, and uses nothing of it. */
