/* A library with the functions of NCCL. They write down their names and arguments, and return what
 * the test has set. The header is NCCL's own, so the compiler compares the definitions with it.
 *
 * Macros for libraries that are not as they should be: STUB_VERSION, STUB_VERSION_RESULT,
 * STUB_WITHOUT_VERSION, STUB_WITHOUT_SPLIT, STUB_WITHOUT_OPTIONAL. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "nccl.h"

#ifndef STUB_VERSION
#define STUB_VERSION NCCL_VERSION_CODE
#endif
#ifndef STUB_VERSION_RESULT
#define STUB_VERSION_RESULT ncclSuccess
#endif

/* A pointer, for %lx. */
#define P(pointer) ((unsigned long)(pointer))

/* The calls, one per line. */
char stub_calls[65536];
/* What the functions return. */
int stub_answer = ncclSuccess;
/* The state of all communicators. */
int stub_state = ncclSuccess;
/* The text of the last error. */
char stub_last_error[64] = "";

static ncclResult_t record(const char *format, ...) {
  size_t length = strlen(stub_calls);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(stub_calls + length, sizeof(stub_calls) - length, format, arguments);
  va_end(arguments);
  strcat(stub_calls, "\n");
  return (ncclResult_t)stub_answer;
}

/* The fields of a configuration, or "null". */
static const char *show(const ncclConfig_t *config) {
  static char text[128];
  if (config == NULL) return "null";
  snprintf(text, sizeof(text), "[%zu %x %u %d %d]", config->size, config->magic, config->version,
           config->blocking, config->splitShare);
  return text;
}

#ifndef STUB_WITHOUT_VERSION
ncclResult_t ncclGetVersion(int *version) {
  *version = STUB_VERSION;
  record("ncclGetVersion");
  return STUB_VERSION_RESULT;
}
#endif

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; i++) id->internal[i] = (char)(i + 1);
  return record("ncclGetUniqueId");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  int matching = 0;
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; i++) matching += id.internal[i] == (char)(i + 1);
  *comm = (ncclComm_t)0xc0;
  return record("ncclCommInitRankConfig %d %d %d %s", nranks, matching, rank, show(config));
}

#ifndef STUB_WITHOUT_SPLIT
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config) {
  *newcomm = (ncclComm_t)0xc1;
  return record("ncclCommSplit %lx %d %d %s", P(comm), color, key, show(config));
}
#endif

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return record("ncclCommFinalize %lx", P(comm)); }

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return record("ncclCommDestroy %lx", P(comm)); }

ncclResult_t ncclCommAbort(ncclComm_t comm) { return record("ncclCommAbort %lx", P(comm)); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
  *state = (ncclResult_t)stub_state;
  return record("ncclCommGetAsyncError %lx", P(comm));
}

const char *ncclGetErrorString(ncclResult_t code) {
  static char text[64];
  record("ncclGetErrorString %d", code);
  snprintf(text, sizeof(text), "description of %d", code);
  return text;
}

const char *ncclGetLastError(ncclComm_t comm) {
  record("ncclGetLastError %lx", P(comm));
  return stub_last_error;
}

ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
  *ptr = (void *)0xa110c;
  return record("ncclMemAlloc %zu", size);
}

ncclResult_t ncclMemFree(void *ptr) { return record("ncclMemFree %lx", P(ptr)); }

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle) {
  *handle = (void *)0x4e9;
  return record("ncclCommRegister %lx %lx %zu", P(comm), P(buff), size);
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
  return record("ncclCommDeregister %lx %lx", P(comm), P(handle));
}

ncclResult_t ncclGroupStart(void) { return record("ncclGroupStart"); }

ncclResult_t ncclGroupEnd(void) { return record("ncclGroupEnd"); }

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return record("ncclAllReduce %lx %lx %zu %d %d %lx %lx", P(sendbuff), P(recvbuff), count,
                datatype, op, P(comm), P(stream));
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return record("ncclReduceScatter %lx %lx %zu %d %d %lx %lx", P(sendbuff), P(recvbuff), recvcount,
                datatype, op, P(comm), P(stream));
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return record("ncclAllGather %lx %lx %zu %d %lx %lx", P(sendbuff), P(recvbuff), sendcount,
                datatype, P(comm), P(stream));
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return record("ncclBroadcast %lx %lx %zu %d %d %lx %lx", P(sendbuff), P(recvbuff), count,
                datatype, root, P(comm), P(stream));
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return record("ncclSend %lx %zu %d %d %lx %lx", P(sendbuff), count, datatype, peer, P(comm),
                P(stream));
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return record("ncclRecv %lx %zu %d %d %lx %lx", P(recvbuff), count, datatype, peer, P(comm),
                P(stream));
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  /* NCCL numbers operators from here on. */
  *op = (ncclRedOp_t)(ncclNumOps + 2);
  return record("ncclRedOpCreatePreMulSum %g %d %d %lx", *(float *)scalar, datatype, residence,
                P(comm));
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return record("ncclRedOpDestroy %d %lx", op, P(comm));
}

#ifndef STUB_WITHOUT_OPTIONAL
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *newcomm,
                            ncclConfig_t *config, int flags) {
  *newcomm = (ncclComm_t)0xc2;
  record("ncclCommShrink %lx %d %d %d %s %d", P(comm), count, excluded[0], excluded[1],
         show(config), flags);
  /* NCCL sorts the list. */
  excluded[0] = 0;
  return (ncclResult_t)stub_answer;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  return record("ncclCommRevoke %lx %d", P(comm), flags);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                    int flags) {
  *win = (ncclWindow_t)0x317d;
  return record("ncclCommWindowRegister %lx %lx %zu %d", P(comm), P(buff), size, flags);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  return record("ncclCommWindowDeregister %lx %lx", P(comm), P(win));
}
#endif
