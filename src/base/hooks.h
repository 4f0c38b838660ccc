#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"
#include "on_posix.h"
#include "on_windows.h"

/* ------------------------------------------------------------------------------------------ default hooks */

static void tt__default_log(void *user, tt_log_level level, const char *id, const char *message)
{
    (void)user;
    static const char *const names[] = {"debug", "info", "warning", "error"};
    if (level >= TT_LOG_WARNING) fprintf(stderr, "tinytrain %s [%s]: %s\n", names[level], id, message);
}

static void *tt__default_allocate(void *user, size_t bytes, size_t alignment)
{
    const bool large = bytes >= ((size_t)4 << 20);
    (void)user;
    return tt__system_allocate(bytes, large ? (size_t)2 << 20 : alignment, large);
}

static void tt__default_release(void *user, void *memory, size_t bytes)
{
    (void)user, (void)bytes;
    tt__system_release(memory);
}

static void tt__default_bytes(void *user, size_t bytes, char *to, size_t capacity)
{
    (void)user;
    snprintf(to, capacity, "%zu", bytes);
}

tt_context_options tt_context_options_default(void)
{
    tt_context_options o;
    memset(&o, 0, sizeof o);
    o.seed = 1;
    o.timeout = 600;
#ifndef NDEBUG
    o.verify = true;
#endif
    o.logger.log = tt__default_log;
    o.allocator.allocate = tt__default_allocate;
    o.allocator.release = tt__default_release;
    o.files = tt__system_files;
    o.wording.bytes = tt__default_bytes;
    return o;
}
