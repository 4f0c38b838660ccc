/* The implementation of tinytrain.h, built once for all fuzz targets. */
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
