#pragma once
#include "../api/context.h"
#include "../api/params.h"
#include "launch.h"
#include "ops.h"

/* ------------------------------------------------------------------------------------- a backend's functions
   Pointers called `memory` point to the device's memory: only the backend reads and writes through them.
   `launch` and `stage` use the stream of their instruction, all other functions the stream of computation. A
   stream does its work in the order of the calls, possibly after the calls return. `read` and `wait` return
   only when their work is done. A function that fails returns a status or NULL, and error() says why in a
   sentence. One thread uses a device at a time. */

/* Streams of a device run in parallel; only `mark` and `after` order the work of different streams. There is
   a stream for computation, one for copies to the host's memory, one for copies from the host's memory and
   one for collectives. TT__HOST_STREAM is not a stream: the host waits for an event. */
enum {
    TT__HOST_STREAM = -1, TT__COMPUTE_STREAM, TT__OUT_STREAM, TT__IN_STREAM, TT__RANKS_STREAM, TT__STREAMS
};

typedef struct tt__backend {
    /* Opens device number `index` as one of `ranks` ranks that run together. Returns NULL on failure and
       writes a sentence into `error`. */
    tt__device *(*open)(tt_context *ctx, int index, int ranks, char *error, size_t capacity);
    void (*close)(tt__device *d);
    const char *(*error)(tt__device *d);
    void *(*allocate)(tt__device *d, size_t bytes);           /* the memory's contents are undefined */
    void (*release)(tt__device *d, void *memory);
    /* Allocates memory that moves between the device and the host as it is used. *available receives the
       bytes that the device had free; without `beyond` the function refuses to allocate more than those
       bytes. `allocate_managed`, `keep` and `prefetch` are NULL if the device has no such memory. */
    tt_status (*allocate_managed)(tt__device *d, size_t bytes, bool beyond, void **memory, size_t *available);
    tt_status (*keep)(tt__device *d, void *memory, size_t bytes); /* asks the device to keep the bytes in its
                                                                     memory */
    tt_status (*prefetch)(tt__device *d, int stream, void *memory, size_t bytes); /* begins to move the bytes
                                                                                     to the device's memory */
    void *(*allocate_host)(tt__device *d, size_t bytes);      /* host memory that `copy` can use            */
    void (*release_host)(tt__device *d, void *host);
    /* Copies between the device's memory and memory of allocate_host, in either direction, or within the
       device's memory. The caller leaves the host's memory alone until `wait` returns, or until the host has
       waited for a later mark of the stream. */
    tt_status (*copy)(tt__device *d, int stream, void *to, const void *from, size_t bytes);
    tt_status (*fill)(tt__device *d, void *memory, int byte, size_t bytes);
    /* Initialises numbers [first, first + n) of a tensor as tt__init_values does; first is a multiple of
       4. */
    tt_status (*init)(tt__device *d, void *memory, tt_dtype dtype, int64_t first, int64_t n, tt_init init,
                      uint64_t key);
    tt_status (*read)(tt__device *d, void *to, const void *memory, size_t bytes);
    tt_status (*wait)(tt__device *d);
    /* `mark` makes *event stand for all work that the stream was given so far. If *event is NULL, `mark`
       first creates the event, which `release_event` frees. `after` makes all later work of the stream wait
       for `event`; with TT__HOST_STREAM the caller waits. */
    tt_status (*mark)(tt__device *d, int stream, void **event);
    tt_status (*after)(tt__device *d, int stream, void *event);
    void (*release_event)(tt__device *d, void *event);
    /* Launches n instructions. If n is above 1, there are two cases. In the first case the instructions have
       one op and one stream and are independent: the device may run them at once or, if they have a
       workspace, one after another. In the second case n is 2, and the second instruction, of another op,
       reads result 0 of the first: dropout and a norm, or a norm's backward and dropout. The device may fuse
       the two if no result of the second is stored over an operand of the first. */
    tt_status (*launch)(const tt__launch *l, int n);
    /* The next four functions record and replay launches. Launches after `capture` are recorded, not run.
       `captured` ends the recording and returns it. If recording failed, `captured` returns NULL, and nothing
       is left for `forget`. `replay` runs a recording any number of times, until `forget` frees it. In a
       recording, the stream of computation gets the first work, and in the end waits for all work of the
       other streams. All four functions are NULL if the device cannot record. */
    tt_status (*capture)(tt__device *d);
    void *(*captured)(tt__device *d);
    tt_status (*replay)(tt__device *d, void *recording);
    void (*forget)(tt__device *d, void *recording);
    /* Returns NULL if device number `index` can run an instruction or, if there is no such device, if the
       backend can. Otherwise returns the reason why not, in words that end an error message. The operands of
       `l` have their full capacity and no data; no device need be open. */
    const char *(*refuses)(int index, const tt__launch *l);
    /* Writes the text that tt_device_text returns. Device number `index` need not exist. */
    void (*describe)(tt_context *ctx, int index, char *to, size_t capacity);
    /* Returns NULL if kernels of d can load from the memory of `from`, another device of the same kind, as a
       test with data has shown; else the reason, a sentence that lives until the next call. *rate receives
       the bytes a second of such loads, or of copies through the host if kernels cannot load; 0: unknown. */
    const char *(*peer)(tt__device *d, tt__device *from, double *rate);
    /* Copies to staged[me] the elements that other members need from this member in the current phase of a
       collective: elements [from, from + max) of each shard (tt__launch), at most members * max elements.
       *more receives whether shards have further elements; all members receive the same value. stage and
       `more` are NULL if kernels can load from all memory. */
    tt_status (*stage)(const tt__launch *l, bool *more);
    tt_status (*available)(tt__device *d, size_t *bytes); /* sets *bytes to the free memory of the device;
                                                             NULL: the device has the host's memory */
    /* Finds the matrix products that launches of one op need. If `times`, measures, for each product that has
       no measurement yet, all ways to compute it, in memory that is freed again, and keeps the fastest way
       for launches that are `tuned`. A measurement also serves equal products with other numbers of rows.
       *untimed grows by the number of products for which memory does not suffice. `tune`, `tuned_text` and
       `learn` are NULL if the device has only one way to compute a product. */
    tt_status (*tune)(const tt__launch *l, int n, bool times, int *untimed);
    /* Writes the device's choices to `to`, a line of text for each product, and returns the length of the
       whole text, even if `to` is too small. */
    size_t (*tuned_text)(tt__device *d, char *to, size_t capacity);
    /* Replaces the device's choices by the choices in a text that tuned_text wrote. TT_ERR_UNSUPPORTED: the
       text is for another kind of device; TT_ERR_FORMAT: line number *line is malformed. After an error the
       device keeps its choices. */
    tt_status (*learn)(tt__device *d, const char *text, int *line);
} tt__backend;

/* Facts that a plan needs about a kind of device, even if this build cannot run it. */
typedef struct tt__device_kind {
    const char *name;
    const tt__backend *backend; /* NULL: this build can only plan for this kind                             */
    size_t alignment;   /* bytes of alignment of storages; a power of two, at least TT__ALIGN               */
    size_t resident;    /* bytes of workspace that persist between instructions and runs                    */
    bool host;          /* the device's memory is the host's, and launches are complete when they return */
    /* Returns the bytes of workspace, beside `resident`, that instruction i needs at full capacity. threads:
       the threads of a device of kind "cpu". */
    size_t (*workspace)(int threads, const tt_tape *t, const tt__instr *i);
} tt__device_kind;

#if defined(TINYTRAIN_CUDA) || defined(TINYTRAIN_BACKEND)
#ifdef __cplusplus
extern "C" {
#endif
extern const tt__backend tt__cuda_backend; /* defined in tinytrain_cuda.cu                                  */
#ifdef __cplusplus
}
#endif
#endif
