#define TINYTRAIN_IMPLEMENTATION
#include <tinytrain.h>
