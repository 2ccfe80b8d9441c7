/* Types of CUDA's header that nccl.h uses. */
#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H
#define CUDART_VERSION 13000
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
#endif
