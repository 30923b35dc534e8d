import groovy.transform.CompileStatic
import io.netty.handler.codec.http.FullHttpResponse
import io.netty.handler.codec.http.HttpMethod
import io.netty.handler.codec.http.HttpRequest
import org.pytorch.serve.metrics.MetricCache
import org.pytorch.serve.util.ConfigManager

/**
 * What is answered when a request's header is there, before a byte of its body is held: that its model's queue is full.
 * Under overload most requests end so, and what they cost is taken from those that are answered: TorchServe (0.12) gathers
 * the body, copies it, makes a job of it, and closes the connection, so that the next try costs a new one.
 */
@CompileStatic
class Overload {
    private static final String PREDICTIONS = '/predictions/'

    /**
     * The answer to a request whose model's queue is full, counted as TorchServe's own; null where it goes on.
     *
     * @param path of the request, without its query
     */
    static FullHttpResponse answer(HttpRequest request, String path) {
        boolean asks = path.startsWith(PREDICTIONS) && !path.contains('%') && request.method() in [HttpMethod.POST, HttpMethod.PUT]
        List<String> words = asks ? path.substring(PREDICTIONS.length()).tokenize('/') : []
        if (!(words.size() in 1..2)) {
            return null
        }
        String version = words.size() == 2 ? words[1] : null
        ModelQueue queue = Models.queueOf(words[0], version)
        if (queue == null || !queue.isFull()) {
            return null
        }
        String host = ConfigManager.getInstance().getHostName()
        count('ts_inference_requests_total', [words[0], version ?: 'default', host])
        count('Requests5XX', ['Host', host])
        return Answers.of(503, Answers.error(503, 'ServiceUnavailableException', queue.refusal()))
    }

    private static void count(String metric, List<String> dimensions) {
        MetricCache.getInstance().getMetricFrontend(metric)?.addOrUpdate(dimensions, 1.0d)
    }
}
