// Flips one bit of what recv() returns, once the file $FLIP exists: for LD_PRELOAD. The file has "least most skip
// position": only results of least to most bytes count, the first `skip` of them pass, and the bit is at `position`, a
// fraction of the bits. The file $FLIP.done appears when it has been flipped.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static atomic_int seen, done;

ssize_t recv(int fd, void* data, size_t size, int flags) {
  static ssize_t (*real)(int, void*, size_t, int);
  if (!real) real = (ssize_t(*)(int, void*, size_t, int))dlsym(RTLD_NEXT, "recv");
  const ssize_t got = real(fd, data, size, flags);
  const char* path = getenv("FLIP");
  if (got <= 0 || (flags & MSG_PEEK) || !path || done || access(path, F_OK) != 0) return got;
  long least = 0, most = 0, skip = 0;
  double position = 0;
  FILE* const file = fopen(path, "r");
  if (!file) return got;
  const int num_read = fscanf(file, "%ld %ld %ld %lf", &least, &most, &skip, &position);
  fclose(file);
  if (num_read != 4 || got < least || got > most || seen++ < skip || done++) return got;
  const long bit = (long)(position * 8 * (double)got);
  ((char*)data)[bit / 8] ^= (char)(1 << bit % 8);
  char text[4096];
  snprintf(text, sizeof text, "%s.done", path);
  FILE* const mark = fopen(text, "w");
  if (mark) fclose(mark);
  return got;
}
