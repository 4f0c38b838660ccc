#pragma once
#include "../api/context.h"
#include "../api/params.h"
#include "launch.h"
#include "ops.h"

/* ------------------------------------------------------------------------------------- a backend's functions
   Pointers called memory are the device's: only the backend looks into them. Launches, and stage, are on the
   stream of their instruction, all else is on that of computation. What is on one stream is done in the order
   of the calls, and may be done after they return, but for read and wait. Where a function fails it returns a
   status or NULL, and error() tells why in a sentence. One thread uses a device at a time. */

/* Streams run beside each other, but for what mark and after order: of computation, of copies to the host's
   memory and from it, and of collectives. Another number is an event's waiter: the host. */
enum {
    TT__HOST_STREAM = -1, TT__COMPUTE_STREAM, TT__OUT_STREAM, TT__IN_STREAM, TT__RANKS_STREAM, TT__STREAMS
};

typedef struct tt__backend {
    /* Device number `index`, as one of so many ranks that run together. */
    tt__device *(*open)(tt_context *ctx, int index, int ranks, char *error, size_t capacity);
    void (*close)(tt__device *d);
    const char *(*error)(tt__device *d);
    void *(*allocate)(tt__device *d, size_t bytes);           /* with any contents                          */
    void (*release)(tt__device *d, void *memory);
    /* As allocate, of memory that moves between the device and the host as it is used. *available: the bytes
       that the device had free; more are allocated only with `beyond`. NULL, as the two below, where there is
       no such memory. */
    tt_status (*allocate_managed)(tt__device *d, size_t bytes, bool beyond, void **memory, size_t *available);
    tt_status (*keep)(tt__device *d, void *memory, size_t bytes); /* these stay on the device if they can   */
    tt_status (*prefetch)(tt__device *d, int stream, void *memory, size_t bytes); /* ... come to it         */
    void *(*allocate_host)(tt__device *d, size_t bytes);      /* for copy                                   */
    void (*release_host)(tt__device *d, void *host);
    /* Copies to memory from what allocate_host gave, the other way, or within memory. What it reads, and
       where it writes on the host, is left alone until after a later mark of the stream, or wait. */
    tt_status (*copy)(tt__device *d, int stream, void *to, const void *from, size_t bytes);
    tt_status (*fill)(tt__device *d, void *memory, int byte, size_t bytes);
    /* As tt__init_values: numbers [first, first + n) of the tensor, first a multiple of 4. */
    tt_status (*init)(tt__device *d, void *memory, tt_dtype dtype, int64_t first, int64_t n, tt_init init,
                      uint64_t key);
    tt_status (*read)(tt__device *d, void *to, const void *memory, size_t bytes);
    tt_status (*wait)(tt__device *d);
    /* mark: from now on `event` stands for all that the stream was given; NULL: makes a new one, to be
       released. after: what the stream, or the caller (TT__HOST_STREAM), does from now on waits for that. */
    tt_status (*mark)(tt__device *d, int stream, void **event);
    tt_status (*after)(tt__device *d, int stream, void *event);
    void (*release_event)(tt__device *d, void *event);
    /* One instruction, or several of one op and stream of which none reads what another writes: these may be
       done at once, or, where they have a workspace, one after another. Or two of different ops, of which the
       second reads result 0 of the first: dropout and a norm, or a norm's backward and dropout. These may be
       done at once where the results of the second do not lie where operands of the first do. */
    tt_status (*launch)(const tt__launch *l, int n);
    /* Launches after capture are recorded, not done; captured ends that (NULL: it failed, nothing is left);
       replay does them, any number of times, until forget. Between the two, computation is first, and waits
       for all that other streams are given. NULL where there is no such thing. */
    tt_status (*capture)(tt__device *d);
    void *(*captured)(tt__device *d);
    tt_status (*replay)(tt__device *d, void *recording);
    void (*forget)(tt__device *d, void *recording);
    /* What the backend, or device number `index` if it is there, lacks for an instruction, to follow "cannot
       run", or NULL. Operands are at capacity, without data; no device need be open. */
    const char *(*refuses)(int index, const tt__launch *l);
    /* tt_device_text's lines, whether there is such a device or not. */
    void (*describe)(tt_context *ctx, int index, char *to, size_t capacity);
    /* What keeps kernels of d from loading from the memory of `from`, another device of the same kind, as a
       sentence that lives until the next call; NULL: nothing does, which was tried with data. *rate: bytes a
       second, of that way or of the one through the host; 0: not measured. */
    const char *(*peer)(tt__device *d, tt__device *from, double *rate);
    /* Copies to staged[me] what other members need of this one in the phase of a collective, for elements
       [from, from + most) of each piece: at most members * most elements. *more: pieces go on behind these,
       the same on all members. Both are NULL where kernels load from all memory. */
    tt_status (*stage)(const tt__launch *l, bool *more);
    tt_status (*available)(tt__device *d, size_t *bytes); /* of its memory; NULL: it is the host's          */
    /* Times (`times`) the products that launches of one op would make and of which nothing is known, each way
       to make one, with memory that it gives back, and keeps the fastest for launches that are `tuned`. Notes
       which products there are: what was timed for these stands in for the same with other numbers of rows.
       *untimed grows by the products for which there is no memory. NULL, as the two below: the device knows
       one way. */
    tt_status (*tune)(const tt__launch *l, int n, bool times, int *untimed);
    /* Writes the choices of products to `to`, a line of text each, and returns the length of the whole text,
       also where `to` is too small for it. */
    size_t (*tuned_text)(tt__device *d, char *to, size_t capacity);
    /* Takes the choices of such a text in place of the device's own. TT_ERR_UNSUPPORTED: the text is of
       another kind of device; TT_ERR_FORMAT: line number *line is no such line. After an error the device
       keeps its own choices. */
    tt_status (*learn)(tt__device *d, const char *text, int *line);
} tt__backend;

/* What a plan must know of a kind of device, whether this build can run it or not. */
typedef struct tt__device_kind {
    const char *name;
    const tt__backend *backend; /* NULL: this build has none, and only plans                                */
    size_t alignment;   /* of storages; a power of two, at least TT__ALIGN                                  */
    size_t resident;    /* bytes of workspace that stay between instructions and runs                       */
    bool host;          /* its memory is the host's, and a launch is done when it returns                   */
    /* Bytes that i needs beside it, at full capacity. threads: of a device of the kind "cpu". */
    size_t (*workspace)(int threads, const tt_tape *t, const tt__instr *i);
} tt__device_kind;

#if defined(TINYTRAIN_CUDA) || defined(TINYTRAIN_BACKEND)
#ifdef __cplusplus
extern "C" {
#endif
extern const tt__backend tt__cuda_backend; /* tinytrain_cuda.cu                                             */
#ifdef __cplusplus
}
#endif
#endif
