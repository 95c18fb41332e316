/* Work that a program names, put on XLA's stream without Python.

   tape.py records the C calls that the work makes on each device: NCCL's, and CUDA's where a
   watchdog looks on. Here the gaps they have for the stream and the buffers are filled and the
   calls are made. Whatever is out of the ordinary goes to Python's handler (ffi.py). */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "xla/ffi/api/c_api.h" /* jaxlib's own, at jax.ffi.include_dir() */

/* The structures below have their twins in tape.py. */
enum { ARGUMENTS = 16, BUCKETS = 4096 };
enum { GIVEN, STREAM, INPUT, OUTPUT };

typedef uint64_t Word; /* an argument: integers and pointers travel alike */
typedef int Function(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                     Word, Word, Word);

typedef struct {
  int64_t source; /* GIVEN, or what fills the gap */
  Word value;     /* as given, or which input or output */
  Word offset;    /* bytes behind that input or output */
} Argument;

typedef struct {
  Function *function; /* those of fewer parameters do not look at the rest */
  int64_t cleanup;    /* the step to take before giving up if this one fails, and then its own,
                         or 0 */
  Argument arguments[ARGUMENTS];
} Step;

typedef struct { /* on one device; without steps where the work has none */
  const volatile int32_t *unusable;
  int64_t size;
  const Step *steps;
} Tape;

typedef struct Work {
  struct Work *next;
  const char *text;
  int64_t length;
  int64_t devices;
  const Tape *tapes; /* by ordinal */
} Work;

typedef XLA_FFI_Error *Python(XLA_FFI_CallFrame *, int has_stream, const Step *failed, int result);

/* The other handlers: they do all work, or say which step failed. One for work that XLA may
   capture in CUDA graphs, one for work that it must not. */
enum { PLAIN, GRAPH };
Python *python[2];
_Atomic int64_t calls; /* of XLA's that ended here */

static _Atomic(Work *) buckets[BUCKETS];

static _Atomic(Work *) *bucket(const char *text, int64_t length) {
  uint64_t hash = 14695981039346656037u; /* FNV-1a */
  for (int64_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
  return &buckets[hash % BUCKETS];
}

/* From here on `work` is what its text names; nothing added is ever freed. One caller at a time. */
void add(Work *work) {
  _Atomic(Work *) *head = bucket(work->text, work->length);
  work->next = atomic_load(head);
  atomic_store(head, work);
}

static const Work *find(const XLA_FFI_ByteSpan *text) {
  const Work *work = atomic_load(bucket(text->ptr, text->len));
  while (work && (work->length != (int64_t)text->len || memcmp(work->text, text->ptr, text->len)))
    work = work->next;
  return work;
}

static Word address(const void *buffer) { return (Word)((const XLA_FFI_Buffer *)buffer)->data; }

static int make(const Step *step, const XLA_FFI_CallFrame *frame, void *stream) {
  Word a[ARGUMENTS];
  for (int i = 0; i < ARGUMENTS; i++) {
    Word value = step->arguments[i].value, offset = step->arguments[i].offset;
    switch (step->arguments[i].source) {
      case GIVEN: a[i] = value; break;
      case STREAM: a[i] = (Word)stream; break;
      case INPUT: a[i] = address(frame->args.args[value]) + offset; break;
      case OUTPUT: a[i] = address(frame->rets.rets[value]) + offset; break;
    }
  }
  return step->function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
                        a[12], a[13], a[14], a[15]);
}

/* Functions for tapes. Rows hold the addresses of operand and results of the last exchanges, the
   newest first: pc_begin makes a row for another one, pc_note fills it, and pc_take strikes result
   `i` of the exchange off that it belongs to. */
int pc_begin(Word *rows, Word count, Word width) {
  memmove(rows + width, rows, (count - 1) * width * sizeof *rows);
  memset(rows, 0, width * sizeof *rows);
  return 0;
}
int pc_note(Word *rows, Word i, Word address) {
  rows[i] = address;
  return 0;
}
int pc_take(Word *rows, Word count, Word width, Word i, Word operand, Word result) {
  for (Word *row = rows; row < rows + count * width; row += width)
    if (row[0] == operand && row[i] == result) {
      row[i] = 0;
      return 0;
    }
  return 1;
}

/* The threads of `size` ranks meet: returns 0 once all others have come as often as this one, or 1
   once `unusable` says that they may never: where results lie is not known then. They leave word
   where their results lie, in one half of `results` in odd turns and in the other in even ones: a
   thread that is a turn ahead does not overwrite what another has yet to read. */
int pc_meet(_Atomic Word *turns, Word *results, Word me, Word size, Word result,
            const volatile int32_t *unusable) {
  Word mine = atomic_load(&turns[me]) + 1;
  results[mine % 2 * size + me] = result;
  atomic_store(&turns[me], mine);
  for (Word i = 0; i < size; i++)
    for (int spins = 0; atomic_load(&turns[i]) < mine && !*unusable;)
      if (++spins > 1000) sched_yield();
  return *unusable;
}

/* `pc_meet`, without results, but where the stream is being captured: nothing waits on it then, and
   others may not capture. `capturing` is cuStreamIsCapturing. */
int pc_meet_if_it_runs(Function *capturing, Word stream, _Atomic Word *turns, Word *results,
                       Word me, Word size, const volatile int32_t *unusable) {
  int status = 0;
  int failed = capturing(stream, (Word)&status, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  if (failed || status) return failed;
  return pc_meet(turns, results, me, size, 0, unusable);
}

/* Copies to a rank's result, by `copy`, which is cuMemcpyDtoDAsync. */
int pc_push(Function *copy, const _Atomic Word *turns, const Word *results, Word me, Word size,
            Word rank, Word offset, Word source, Word nbytes, Word stream) {
  Word target = results[atomic_load(&turns[me]) % 2 * size + rank] + offset;
  return copy(target, source, nbytes, stream, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}

/* Launches a kernel of at most 8 parameters of 64 bits; `launch` is cuLaunchKernel. */
int pc_launch(Function *launch, Word kernel, Word blocks, Word threads, Word stream, Word p0,
              Word p1, Word p2, Word p3, Word p4, Word p5, Word p6, Word p7) {
  void *parameters[] = {&p0, &p1, &p2, &p3, &p4, &p5, &p6, &p7};
  return launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (Word)parameters, 0, 0, 0, 0, 0, 0);
}

static XLA_FFI_Error *run(XLA_FFI_CallFrame *frame, int has_stream, Python *python) {
  if (frame->extension_start) return python(frame, has_stream, 0, 0);
  XLA_FFI_Stream_Get_Args stream = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, 0, frame->ctx, 0};
  XLA_FFI_DeviceOrdinal_Get_Args device = {
      XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, 0, frame->ctx, 0};
  XLA_FFI_Error *error = has_stream ? frame->api->XLA_FFI_Stream_Get(&stream) : 0;
  if (!error) error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
  if (error) return error;

  const Work *work = find(frame->attrs.attrs[0]);
  if (!work || device.device_ordinal >= work->devices) return python(frame, has_stream, 0, 0);
  const Tape *tape = &work->tapes[device.device_ordinal];
  if (!tape->size || *tape->unusable) return python(frame, has_stream, 0, 0);
  atomic_fetch_add(&calls, 1);
  for (int64_t i = 0; i < tape->size; i++) {
    const Step *step = &tape->steps[i];
    int result = make(step, frame, stream.stream);
    if (result) {
      for (int64_t end = step->cleanup; end; end = tape->steps[end].cleanup)
        make(&tape->steps[end], frame, stream.stream);
      return python(frame, has_stream, step, result);
    }
  }
  return 0;
}

XLA_FFI_Error *on_stream_graph(XLA_FFI_CallFrame *frame) { return run(frame, 1, python[GRAPH]); }
XLA_FFI_Error *on_stream_plain(XLA_FFI_CallFrame *frame) { return run(frame, 1, python[PLAIN]); }
XLA_FFI_Error *on_host_graph(XLA_FFI_CallFrame *frame) { return run(frame, 0, python[GRAPH]); }
XLA_FFI_Error *on_host_plain(XLA_FFI_CallFrame *frame) { return run(frame, 0, python[PLAIN]); }
