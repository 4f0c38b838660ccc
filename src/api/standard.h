#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
