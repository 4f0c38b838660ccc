#include "tinytrain.c"
